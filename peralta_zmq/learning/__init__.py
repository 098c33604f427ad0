"""From groups to an optimizer step: `learner` is the story; the rest are its formulas and parts."""
