"""The page of reports: one HTML file. `render` makes it from a `Page`; knows no statistics and no file on disk."""
