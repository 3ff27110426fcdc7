//! A bearer token in a file that another program, such as the kubelet, writes.
//!
//! kube reads such files too. But it also sends the line break at their end, which no header may
//! hold, and uses the old token for up to a minute.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use http::HeaderValue;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenFileError {
    #[error("token file {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("token file {path}: is empty")]
    Empty { path: PathBuf },
    #[error("token file {path}: holds characters that no token has")]
    Invalid { path: PathBuf },
}

/// A token file that may be missing for a while or for good. Its last token is used then. client-go
/// does the same, for those who remove the file to keep it from others.
#[derive(Clone)]
pub(crate) struct TokenFile {
    path: PathBuf,
    last: Arc<Mutex<Option<HeaderValue>>>,
}

impl TokenFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, last: Arc::default() }
    }

    pub(crate) fn read(&self) -> Result<HeaderValue, TokenFileError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match (read_token(&self.path), &*last) {
            (Ok(token), _) => Ok(last.insert(token).clone()),
            (Err(error), Some(token)) => {
                tracing::debug!("{error}; using the token that was read last");
                Ok(token.clone())
            }
            (Err(error), None) => Err(error),
        }
    }
}

/// Returns the bearer token that `path` holds now. It is read for each request, because requests
/// are rare: a new token is used as soon as it is there. White space around it is not part of it.
pub(super) fn read_token(path: &Path) -> Result<HeaderValue, TokenFileError> {
    let text =
        fs::read_to_string(path).map_err(|source| TokenFileError::Read { path: path.to_owned(), source })?;
    let token = text.trim();
    if token.is_empty() {
        return Err(TokenFileError::Empty { path: path.to_owned() });
    }
    bearer(token).map_err(|_| TokenFileError::Invalid { path: path.to_owned() })
}

#[derive(Debug, thiserror::Error)]
#[error("holds characters that no token has")]
pub(crate) struct InvalidToken;

/// Returns the header that carries a token. kube panics on a token that no header can hold.
pub(super) fn bearer(token: &str) -> Result<HeaderValue, InvalidToken> {
    let mut header = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| InvalidToken)?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_kept_when_its_file_is_removed_and_replaced_when_that_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let token = TokenFile::new(path.clone());
        assert!(token.read().unwrap_err().to_string().contains("No such file"));
        fs::write(&path, "first").unwrap();
        assert_eq!(token.read().unwrap(), "Bearer first");
        fs::remove_file(&path).unwrap();
        assert_eq!(token.read().unwrap(), "Bearer first");
        fs::write(&path, "second").unwrap();
        assert_eq!(token.read().unwrap(), "Bearer second");
    }
}
