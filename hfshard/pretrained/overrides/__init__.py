"""The methods of a model's class that end in PreTrainedModel's, and what answers there in its place."""
