//! Tells about invalid objects: once each, not at every relist.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use tracing::warn;

use crate::source::InvalidField;

/// What has been told about which object. Holds invalid objects only.
#[derive(Debug, Default)]
pub(super) struct Reported {
    told: HashMap<String, u64>,
}

impl Reported {
    /// Warns about what is new since this object was last seen; returns how many problems that were.
    pub(super) fn tell(&mut self, object: impl FnOnce() -> String, reported: &[InvalidField]) -> usize {
        if reported.is_empty() {
            if !self.told.is_empty() {
                self.told.remove(&object());
            }
            return 0;
        }
        let mut hasher = DefaultHasher::new();
        for field in reported {
            (&field.field, &field.problem).hash(&mut hasher);
        }
        let fingerprint = hasher.finish();
        if self.told.insert(object(), fingerprint) == Some(fingerprint) {
            return 0;
        }
        for field in reported {
            warn!(object = %field.object, field = %field.field, "{}", field.problem);
        }
        reported.len()
    }

    pub(super) fn forget(&mut self, object: &str) {
        self.told.remove(object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(problem: &str) -> InvalidField {
        InvalidField {
            object: "Service a/b".into(),
            field: "spec.ports[0].port".into(),
            problem: problem.into(),
        }
    }

    #[test]
    fn the_same_problem_is_told_once_until_it_changes_or_goes_away() {
        let mut reported = Reported::default();
        assert_eq!(reported.tell(|| "a/b".into(), &[field("is 0")]), 1);
        assert_eq!(reported.tell(|| "a/b".into(), &[field("is 0")]), 0);
        assert_eq!(reported.tell(|| "a/b".into(), &[field("is 70000")]), 1);
        assert_eq!(reported.tell(|| "a/b".into(), &[]), 0);
        assert_eq!(reported.tell(|| "a/b".into(), &[field("is 70000")]), 1);
        reported.forget("a/b");
        assert_eq!(reported.tell(|| "a/b".into(), &[field("is 70000")]), 1);
    }
}
