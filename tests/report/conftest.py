"""Reports for the tests of the page, and a browser that shows them."""

import pytest
from browser import open_browser, open_page
from pages import lesion_report, volume_report


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return lesion_report(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return volume_report(tmp_path_factory.mktemp("volumes"))


@pytest.fixture(scope="module")
def chromium():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def opened(chromium, built):
    watched = open_page(chromium, built.out)
    yield watched.page
    messages = watched.messages
    watched.close()
    assert messages == []
