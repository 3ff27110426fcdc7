//! Declares which types aya may copy as plain bytes.

use super::*;

macro_rules! pod {
    ($($t:ty),* $(,)?) => { $(
        // SAFETY: the type is repr(C) and has integers and byte arrays only. Every byte belongs
        // to a field, and any pattern is valid.
        unsafe impl aya::Pod for $t {}
    )* };
}
pod!(
    Frontend,
    EndpointSet,
    Service,
    ServiceName,
    Slot4,
    Slot6,
    NodeAddress,
    InterfaceSettings,
    VlanTag,
    LinkAddress,
    RedirectTarget,
    FourPorts,
    HostConnection,
    Affinity,
    ServiceCounters,
    Connections,
    Collected,
    Settings,
    Lease,
    RouteEpoch,
    EventControl,
    Event,
    LogControl,
    IcmpErrorCount
);

macro_rules! pod_of_family {
    ($($t:ident),* $(,)?) => { $(
        // SAFETY: the reasons above hold. An `Address` is an array of 4 or 16 bytes, and the
        // sizes are asserted for both.
        unsafe impl<A: Address> aya::Pod for $t<A> {}
    )* };
}
pod_of_family!(
    FrontendKey,
    Backend,
    FlowKey,
    Flow,
    AffinityKey,
    FragmentKey,
    FirstFragment,
    SocketOrigin,
    SourceRange
);

// SAFETY: the reasons above hold for this type, too.
unsafe impl<A: Address> aya::Pod for PrefixKey<SourceRange<A>> {}
// SAFETY: the reasons above hold for this type, too.
unsafe impl<A: Address> aya::Pod for PrefixKey<A> {}
