"""The parts of the screen. They show a `ChatState`; none of them changes it."""
