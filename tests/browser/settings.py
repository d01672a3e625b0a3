"""The demo's settings, with a content security policy that allows nothing but the site's own files."""

from project.demo.settings import *  # noqa: F403
from project.demo.settings import MIDDLEWARE

AFTER_SESSIONS = MIDDLEWARE.index("django.contrib.sessions.middleware.SessionMiddleware") + 1
MIDDLEWARE = [
    "tests.browser.policy.strict",
    *MIDDLEWARE[:AFTER_SESSIONS],
    "django.middleware.locale.LocaleMiddleware",  # the pages are in the language of the browser
    *MIDDLEWARE[AFTER_SESSIONS:],
]
