//! Decides whether the programs answer segments of connections that no map knows. Such a segment
//! may be of a connection that netfilter translates, or go to a frontend that is not listed yet. So
//! the programs answer only while neither is possible.

/// The facts that decide about the answers. By default nothing is known, and nothing is answered.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Circumstances {
    /// True if everything that is desired was listed, and the maps have it.
    pub(crate) is_synced: bool,
    /// True if all interfaces have their programs, and the former proxy or mode opens no
    /// connections.
    pub(crate) has_taken_over: bool,
    /// True if this mode drains, because another mode is to be active.
    pub(crate) is_draining: bool,
    /// True if some pods have no packet programs.
    pub(crate) lacks_programs: bool,
    /// True if another mode serves the same frontends.
    pub(crate) are_frontends_shared: bool,
    /// True if the connections that netfilter translates were listed, and there was room to keep
    /// them all.
    pub(crate) are_netfilters_kept: bool,
    /// True if a whole walk through the entries has found that no such connection is left.
    pub(crate) are_netfilters_gone: bool,
    /// True unless entries of flows may be in a map of another size alone.
    pub(crate) are_flows_whole: bool,
}

impl Circumstances {
    /// Returns true if nobody else can have opened a connection to a frontend.
    pub(crate) const fn allow_answers(self) -> bool {
        self.is_synced
            && self.has_taken_over
            && !self.is_draining
            && !self.lacks_programs
            && !self.are_frontends_shared
            && self.are_netfilters_kept
            && self.are_netfilters_gone
            && self.are_flows_whole
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const ALONE: Circumstances = Circumstances {
        is_synced: true,
        has_taken_over: true,
        is_draining: false,
        lacks_programs: false,
        are_frontends_shared: false,
        are_netfilters_kept: true,
        are_netfilters_gone: true,
        are_flows_whole: true,
    };

    #[rstest]
    #[case::alone(ALONE, true)]
    #[case::at_first(Circumstances::default(), false)]
    #[case::not_listed(Circumstances { is_synced: false, ..ALONE }, false)]
    #[case::without_programs(Circumstances { has_taken_over: false, ..ALONE }, false)]
    #[case::draining(Circumstances { is_draining: true, ..ALONE }, false)]
    #[case::pods_without_programs(Circumstances { lacks_programs: true, ..ALONE }, false)]
    #[case::a_secondary_mode(Circumstances { are_frontends_shared: true, ..ALONE }, false)]
    #[case::connections_not_listed(Circumstances { are_netfilters_kept: false, ..ALONE }, false)]
    #[case::connections_left(Circumstances { are_netfilters_gone: false, ..ALONE }, false)]
    #[case::flows_that_are_copied(Circumstances { are_flows_whole: false, ..ALONE }, false)]
    fn answers(#[case] circumstances: Circumstances, #[case] expected: bool) {
        assert_eq!(circumstances.allow_answers(), expected);
    }
}
