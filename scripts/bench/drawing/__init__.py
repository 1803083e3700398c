"""Charts of what was measured, as SVG that needs nothing but a browser."""
