"""Web dashboard of runs: only reads their files, and needs no running trainer.

run_files   incremental reading of a run folder
charts      column store of the metrics, and the points of each chart (listed in charts.toml)
view        everything shown, as JSON or as one HTML file
app         HTTP server: routes, access control, thread (needs optional packages)
static/     HTML, CSS and JavaScript; uPlot draws the charts
"""
