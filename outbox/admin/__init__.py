"""The outbox in Django's admin. It only shows and calls: packages below read and act."""

from outbox.admin import check_backs, dead, deferred, gaps, inbox, messages, topics
from outbox.admin.about import MessagesAboutMixin

__all__ = ["MessagesAboutMixin", "check_backs", "dead", "deferred", "gaps", "inbox", "messages", "topics"]
