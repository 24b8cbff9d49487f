"""The whole job from Python: the stages as functions, and run directories as objects. `greedynas` itself offers the names."""
