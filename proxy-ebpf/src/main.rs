//! Kernel side of the proxy: socket hooks, TC programs and one of XDP. The decisions are in
//! `proxy-common`; here are the hooks, the maps and the access to packets.
//!
//! `programs.rs` has the entry points. They lead to `socket.rs`, `tc/` and `xdp.rs`, which reach a
//! packet by `bytes/`, the BPF maps by `maps/`, and routing tables by `route.rs`.
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod bytes;
#[cfg(target_arch = "bpf")]
mod event;
#[cfg(target_arch = "bpf")]
mod globals;
#[cfg(target_arch = "bpf")]
mod log;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod programs;
#[cfg(target_arch = "bpf")]
mod route;
#[cfg(target_arch = "bpf")]
mod socket;
#[cfg(target_arch = "bpf")]
mod tc;
#[cfg(target_arch = "bpf")]
mod xdp;

/// A reachable panic is an endless loop, which the verifier refuses: it cannot be shipped.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// GPL-compatible, as helpers such as `bpf_redirect_neigh` ask for. The same as `license` in Cargo.toml.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {}
