"""The page: a run's files as numbers, charts and samples in a browser. Reads, and never writes.

    follow     what has been added to a file of rows since the last look
    table      the numbers of all steps as columns, with what is derived from them
    charts     which numbers are drawn together, and what of them is sent
    run        the files of one run, followed
    view       what the page says of a run: header, cards, generators, events, samples
    samples    one group as the page shows it
    app        the routes; the one door to starlette, with its guard
    guard      who may ask for what
    server     the thread or the process that answers; the one door to uvicorn
    export     the page with its numbers in one file
    door       bin/dashboard

Knows the files of a run and nothing of training; a trainer goes on whatever happens here.
"""
