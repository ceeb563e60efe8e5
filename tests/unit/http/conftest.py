from __future__ import annotations

import pytest
from certificates import Issued, issue


@pytest.fixture(scope="session")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """Files of a peer of the job. A test that renews them issues its own."""
    return issue(tmp_path_factory.mktemp("certificates") / "peer")
