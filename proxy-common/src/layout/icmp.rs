//! Budgets of the answers that refuse packets: the map `icmp_errors`.

/// Value of the map `icmp_errors` (per-CPU array): how many answers were sent. It has one entry for
/// each [`IcmpBudget`], and each load of the programs has its own map.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct IcmpErrorCount {
    /// The second since boot in which `errors` was last counted from 0.
    pub second: u64,
    /// The number of answers in that second, including those that were left out.
    pub errors: u64,
}

/// The purpose of an ICMP error or a RST. Each has a budget of its own, so that a flood of refused
/// packets does not keep clients from learning which length of packets goes through.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum IcmpBudget {
    /// ICMP errors that refuse a packet.
    Refusals = 0,
    TooBig = 1,
    /// RSTs that refuse a SYN, or a segment of a connection which no map knows.
    Resets = 2,
}

/// The largest number of ICMP errors that each CPU sends in a second for each budget. There is a
/// limit, like the kernel's net.ipv4.icmp_msgs_per_sec, because the addressees may be forged.
pub const ICMP_ERRORS_PER_SECOND: u64 = 1_000;
/// The largest number of segments that each CPU answers by a RST in a second.
///
/// These answers take about a hundredth of the CPU, and the clients of an address that moves learn
/// it within seconds.
pub const RESETS_PER_SECOND: u64 = 10_000;

impl IcmpBudget {
    /// Every budget.
    pub const ALL: [Self; 3] = [Self::Refusals, Self::TooBig, Self::Resets];

    /// Returns how many answers of this budget each CPU sends at most in a second.
    pub const fn per_second(self) -> u64 {
        match self {
            Self::Refusals | Self::TooBig => ICMP_ERRORS_PER_SECOND,
            Self::Resets => RESETS_PER_SECOND,
        }
    }
}

const _: () = {
    assert!(size_of::<IcmpErrorCount>() == 16);
};
