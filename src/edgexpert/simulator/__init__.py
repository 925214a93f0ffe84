"""The paper's chip and its rivals as data, driven by plans: latency, traffic and energy of every stage."""
