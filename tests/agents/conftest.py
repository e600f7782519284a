"""What the tests of episodes share."""

from pathlib import Path

import pytest
from helpers.chat_model import save_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    return save_chat_model(tmp_path_factory.mktemp("chat_model"))
