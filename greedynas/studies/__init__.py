"""The paper's studies as commands: the quality of rankings, the networks each method finds, the effect of each part."""
