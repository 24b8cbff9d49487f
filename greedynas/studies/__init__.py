"""The paper's questions as commands: is the ranking real, which method finds what, what does each part bring?"""
