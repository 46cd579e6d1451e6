"""The Responses API: requests become chat requests, what chat's parsers make of the answer becomes items and events."""
