from transformers.utils import logging

from lockstep.utils.quiet import quiet_transformers


def test_inside_only_errors_are_shown_and_outside_all_is_as_before(capsys):
    logger = logging.get_logger("transformers.test")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_transformers():
        assert not logging.is_progress_bar_enabled()
        assert not logger.isEnabledFor(30)
        assert logger.isEnabledFor(40)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
