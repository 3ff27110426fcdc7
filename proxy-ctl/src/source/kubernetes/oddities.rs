//! Tells about odd objects: once each, not at every relist.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use tracing::warn;

use crate::source::Oddity;

/// What has been told about which object. Holds odd objects only.
#[derive(Debug, Default)]
pub(super) struct Oddities {
    told: HashMap<String, u64>,
}

impl Oddities {
    /// Warns about what is new since this object was last seen; returns how many problems that were.
    pub(super) fn tell(&mut self, object: impl FnOnce() -> String, oddities: &[Oddity]) -> usize {
        if oddities.is_empty() {
            if !self.told.is_empty() {
                self.told.remove(&object());
            }
            return 0;
        }
        let mut hasher = DefaultHasher::new();
        for oddity in oddities {
            (&oddity.field, &oddity.problem).hash(&mut hasher);
        }
        let fingerprint = hasher.finish();
        if self.told.insert(object(), fingerprint) == Some(fingerprint) {
            return 0;
        }
        for oddity in oddities {
            warn!(object = %oddity.object, field = %oddity.field, "{}", oddity.problem);
        }
        oddities.len()
    }

    pub(super) fn forget(&mut self, object: &str) {
        self.told.remove(object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oddity(problem: &str) -> Oddity {
        Oddity { object: "Service a/b".into(), field: "spec.ports[0].port".into(), problem: problem.into() }
    }

    #[test]
    fn the_same_problem_is_told_once_until_it_changes_or_goes_away() {
        let mut oddities = Oddities::default();
        assert_eq!(oddities.tell(|| "a/b".into(), &[oddity("is 0")]), 1);
        assert_eq!(oddities.tell(|| "a/b".into(), &[oddity("is 0")]), 0);
        assert_eq!(oddities.tell(|| "a/b".into(), &[oddity("is 70000")]), 1);
        assert_eq!(oddities.tell(|| "a/b".into(), &[]), 0);
        assert_eq!(oddities.tell(|| "a/b".into(), &[oddity("is 70000")]), 1);
        oddities.forget("a/b");
        assert_eq!(oddities.tell(|| "a/b".into(), &[oddity("is 70000")]), 1);
    }
}
