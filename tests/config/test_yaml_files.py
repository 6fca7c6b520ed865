"""Values of YAML files that are none of their tags are errors that readers expect."""

from __future__ import annotations

import pytest
import yaml

from olive_ext.config.yaml_files import LOADER, WRONG_TAGS

NUMBER = ":".join(["1"] * 999)


@pytest.mark.parametrize(
    "text", ["!!int ''", "!!int '-'", "!!float '+_'", "!!bool maybe", "!!timestamp soon", f"{NUMBER}.5"]
)
def test_values_that_are_none_of_their_tags_are_errors_that_readers_expect(text: str) -> None:
    with pytest.raises(WRONG_TAGS):
        yaml.load(f"a: {text}\n", Loader=LOADER)
