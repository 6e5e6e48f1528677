"""From run records to statistics, tables, figures and one offline HTML page."""
