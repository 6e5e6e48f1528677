"""Pages as a browser shows them; `make test-browser` runs these tests."""
