"""Training a drafter for a target: decode with the target (data), fit, evaluate.

Needs no dataset: the target writes its own responses, since a drafter has to imitate the target and not the
world.
"""
