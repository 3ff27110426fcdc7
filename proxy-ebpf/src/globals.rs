//! Constants that the controller sets when it loads the object. They lie in `.rodata`, so the verifier skips
//! the branches that they switch off, with the helpers in them that an old kernel lacks.
//!
//! Of switches 1 is on, everything else off. The defaults are numbers that nothing else uses: LLVM may let an anonymous
//! constant with the same bytes share the address of a global, and would then see what the controller sets there.

use aya_ebpf::Global;

macro_rules! globals {
    ($($(#[doc = $doc:literal])+ $name:ident: $t:ty = $default:expr;)+) => {
        $(
            $(#[doc = $doc])+
            #[unsafe(no_mangle)]
            pub(crate) static $name: Global<$t> = Global::new($default);
        )+
    };
}

/// The value of a global that is switched on.
pub(crate) const ON: u32 = 1;

globals! {
    /// 1: only sockets in the node's own network namespace are balanced.
    SOCKET_HOST_ONLY: u32 = 0x6f66_6601;
    /// 1: the kernel has bpf_set_retval (5.18), so a refused connect() fails with ECONNREFUSED.
    CAN_REFUSE: u32 = 0x6f66_6602;
    /// 1: packets of the node's own processes are translated (socket balancing is off).
    HOST_PACKETS: u32 = 0x6f66_6603;
    /// 1: the programs pass everything on once the controller's lease has ended.
    LEASE: u32 = 0x6f66_6604;
    /// 1: connections whose backend is gone are reset.
    RESETS_GONE: u32 = 0x6f66_6605;
    /// 1: clients are masqueraded that kube-proxy masquerades, and not only those whose answers would not come back.
    MASQUERADE_AS_KUBE_PROXY: u32 = 0x6f66_6606;
    /// 1: what is sent to addresses for ClusterIPs that no service has is dropped.
    DROP_UNALLOCATED: u32 = 0x6f66_6607;
    /// 1: pings of ClusterIPs are answered.
    ANSWER_PING: u32 = 0x6f66_6608;
    /// 1: packets that come from outside may skip the stack.
    SKIP_STACK: u32 = 0x6f66_6609;
}
