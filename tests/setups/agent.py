"""OpenTelemetry's agent as an app: it comments each statement of psycopg."""

from opentelemetry import trace
from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider())
PsycopgInstrumentor().instrument(enable_commenter=True, skip_dep_check=True)
