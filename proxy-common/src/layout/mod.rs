//! Keys and values of the BPF maps, in a file for each group of maps. Maps of plain numbers have no
//! type here.
//!
//! People read `bpftool map dump name frontends4`. So ports are numbers in host byte order (a
//! [`Port`] would be shown as a struct), and methods give and take them as a [`Port`]. Addresses
//! are bytes in the order in which they are written.
//!
//! There is no padding that is not a named field, because a hash map compares keys byte by byte.
//!
//! Any change of a released layout raises [`LAYOUT_VERSION`], which names the folder in which the
//! maps are pinned. Maps of another shape in that folder are refused when they are opened.
//!
//! [`Port`]: crate::port::Port

/// Defines a method for each port that returns it as a `Port`, and one that sets it if code needs
/// that.
macro_rules! ports {
    ($($value:ident: $($port:ident $($set:ident)?),+;)+) => { $(
        impl<A> $value<A> { $(
            #[inline(always)]
            pub const fn $port(&self) -> Port {
                Port::new(self.$port)
            }

            $(
                #[inline(always)]
                pub const fn $set(&mut self, port: Port) {
                    self.$port = port.number();
                }
            )?
        )+ }
    )+ };
}

mod address;
mod affinity;
mod connections;
mod endpoints;
mod event;
mod flow;
mod fragment;
mod frontend;
mod icmp;
mod interface;
mod node;
#[cfg(feature = "user")]
mod pod;
mod service;
mod socket;

pub use self::{
    address::*, affinity::*, connections::*, endpoints::*, event::*, flow::*, fragment::*, frontend::*,
    icmp::*, interface::*, node::*, service::*, socket::*,
};

/// The version of every layout in this folder. The maps live in
/// `<bpffs>/proxy-ctl/v<LAYOUT_VERSION>/`.
pub const LAYOUT_VERSION: u32 = 1;

pub const PROTOCOL_TCP: u8 = 6;
pub const PROTOCOL_UDP: u8 = 17;

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes 1, 2, 3, … of keys and values, and what they are read as.
    const RECORDED: &str = include_str!("v1.txt");

    fn read_as<T: core::fmt::Debug>(lines: &mut String, map: &str, part: &str) {
        let bytes: Vec<u8> = (1..=size_of::<T>()).map(|byte| byte as u8).collect();
        // SAFETY: `bytes` is as long as `T`. Any bytes are valid for `T`, which has integers and
        // arrays of them only.
        let value: T = unsafe { core::ptr::read_unaligned(bytes.as_ptr().cast()) };
        *lines += &format!("{map} {part}, {} bytes: {value:x?}\n", bytes.len());
    }

    /// The maps of a node outlive the process that wrote them, and the next process may have
    /// another version.
    #[test]
    fn layouts_are_as_recorded() {
        type A4 = [u8; 4];
        type A6 = [u8; 16];
        let mut lines = String::new();
        macro_rules! record {
            ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => { $(
                read_as::<$key>(&mut lines, stringify!($name), "key");
                read_as::<$value>(&mut lines, stringify!($name), "value");
            )+ };
        }
        crate::maps!(record);
        if std::env::var_os("WRITE_LAYOUT").is_some() {
            return std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/layout/v1.txt"), lines).unwrap();
        }
        assert_eq!(LAYOUT_VERSION, 1);
        for (line, recorded) in lines.lines().zip(RECORDED.lines()) {
            assert_eq!(line, recorded, "{CHANGED}");
        }
        assert_eq!(lines.lines().count(), RECORDED.lines().count(), "{CHANGED}");
    }

    const CHANGED: &str = "a layout has changed: where it was released, raise LAYOUT_VERSION and convert version 1; \
        before a release WRITE_LAYOUT=1 records it anew";
}
