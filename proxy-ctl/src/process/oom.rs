//! Whom the kernel ends first when memory is short: not this process, or the node loses its network.

use std::{fs, path::Path};

const OWN: &str = "/proc/self/oom_score_adj";

/// `score`: -1000 (never) to 1000. Without CAP_SYS_RESOURCE it can only be raised; as with kube-proxy, that is worth
/// no more than a word.
pub(super) fn set_score(score: i32) {
    set_score_in(Path::new(OWN), score);
}

fn set_score_in(path: &Path, score: i32) {
    if let Err(error) = fs::write(path, score.to_string()) {
        tracing::debug!(%error, score, "Failed to apply OOMScore");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_is_written_as_a_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("oom_score_adj");
        set_score_in(&path, -999);
        assert_eq!(fs::read_to_string(path).unwrap(), "-999");
    }

    #[test]
    fn what_cannot_be_set_is_left() {
        set_score_in(Path::new("/nonexistent/oom_score_adj"), -999);
    }
}
