"""Migrations that run only on PostgreSQL. Unless routers prevent it, Django migrates all apps in each database of a project."""

from __future__ import annotations

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import ProjectState


class PostgreSQLMigration(migrations.Migration):
    """A migration that is recorded as applied in databases other than PostgreSQL, and changes nothing there."""

    def apply(
        self, project_state: ProjectState, schema_editor: BaseDatabaseSchemaEditor, collect_sql: bool = False
    ) -> ProjectState:
        if schema_editor.connection.vendor != "postgresql":
            return self.mutate_state(project_state, preserve=False)
        return super().apply(project_state, schema_editor, collect_sql)

    def unapply(
        self, project_state: ProjectState, schema_editor: BaseDatabaseSchemaEditor, collect_sql: bool = False
    ) -> ProjectState:
        if schema_editor.connection.vendor != "postgresql":
            return project_state
        return super().unapply(project_state, schema_editor, collect_sql)
