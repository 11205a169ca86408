"""The engine: scheduler, pages, batch, runner and sampler, behind a message border."""
