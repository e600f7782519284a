from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lockstep.config import load_config
from lockstep.embedded import task
from lockstep.trainer.run.setup import with_embedded_task


def test_a_model_of_the_users_gets_the_embedded_words_and_no_other_model_is_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was: half a minute, and a line on how well that other model writes words backwards."""
    monkeypatch.setattr(task, "_WarmUp", lambda *_: pytest.fail("a model was warmed up"))
    given = load_config(["actor_rollout_ref.model.path=mine", f"trainer.default_local_dir={tmp_path}"])
    config = with_embedded_task(given)
    assert config.actor_rollout_ref == given.actor_rollout_ref
    assert [pq.read_metadata(file).num_rows for file in (config.data.train_files, config.data.val_files)] == [2048, 256]
    said = capsys.readouterr().out
    assert "Making data in" in said
    assert "warm-up" not in said
    own_validation = load_config(
        ["actor_rollout_ref.model.path=mine", "data.val_files=v.parquet", f"trainer.default_local_dir={tmp_path}"]
    )
    assert with_embedded_task(own_validation).data.val_files == "v.parquet"
