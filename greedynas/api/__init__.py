"""The whole job from Python: the stages as functions and run directories as objects, which `greedynas` exports."""
