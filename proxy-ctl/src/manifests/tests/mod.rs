mod documents;
mod files;
mod watching;
