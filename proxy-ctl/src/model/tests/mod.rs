mod categorize;
mod conflicts;
mod endpoint_choice;
mod sequences;
mod updates;
