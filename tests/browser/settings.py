"""The demo's settings, with a content security policy that allows nothing but the site's own files."""

from project.demo.settings import *  # noqa: F403
from project.demo.settings import MIDDLEWARE

MIDDLEWARE = ["tests.browser.policy.strict", *MIDDLEWARE]
