"""A model's text on its way to a terminal, which obeys what it is sent. Pure, for the engine and the chat."""

_C0 = [code for code in range(0x20) if chr(code) not in "\n\t"]  # ESC begins most control sequences
_C1 = range(0x7F, 0xA0)  # DEL too; 0x9b alone begins a control sequence, 0x9d one that can set the clipboard
_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # Unicode's Bidi_Control
_SURROGATES = range(0xD800, 0xE000)  # which no terminal's encoding can write
_UNPRINTABLE = dict.fromkeys([*_C0, *_C1, *_BIDI, *_SURROGATES])


def printable(text: str) -> str:
    """What of a model's text may reach a terminal: newlines, tabs and nothing else that controls anything.

    Characters are judged one by one, so text may come in any pieces. What followed an ESC stays as the
    harmless text it is without it.
    """
    return text.translate(_UNPRINTABLE)
