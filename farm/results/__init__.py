"""Raw results -> attempts with verdict, cause and figures; statistics of many runs."""
