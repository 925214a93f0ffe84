"""The paper's chip and its baselines as data, driven by plans: latency, traffic and energy of every stage."""
