"""Measurements. They print figures and judge nothing; docs/performance.md says what came of them."""
