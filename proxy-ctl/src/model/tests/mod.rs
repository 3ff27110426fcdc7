mod categorize;
mod conflicts;
mod sequences;
mod updates;
