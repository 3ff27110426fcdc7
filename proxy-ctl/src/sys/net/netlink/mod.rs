//! Netlink messages as bytes, and a socket that sends them and reads the answers. `tc`, nf_tables,
//! ipset, IPVS and others share it.

use std::{
    io::{self, IoSlice},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
    os::fd::AsRawFd as _,
    sync::atomic::{AtomicU32, Ordering},
};

use bytes::BytesMut;
use netlink_sys::{Socket, SocketAddr};
use nix::sys::socket::{MsgFlags, NetlinkAddr, sendmsg};

pub const NLM_F_REQUEST: u16 = 0x1;
pub const NLM_F_ACK: u16 = 0x4;
pub const NLM_F_DUMP: u16 = 0x300;
pub const NLM_F_REPLACE: u16 = 0x100;
pub const NLM_F_EXCL: u16 = 0x200;
pub const NLM_F_CREATE: u16 = 0x400;
pub const NLM_F_APPEND: u16 = 0x800;
/// The flag of a list that changed while it was read, so that something may be missing.
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLMSG_ERROR: u16 = 2;
/// The flag of a verdict that repeats only the header of the request.
const NLM_F_CAPPED: u16 = 0x100;
/// The flag of a verdict that has attributes.
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;
const NLMSG_DONE: u16 = 3;
const NLA_F_NESTED: u16 = 0x8000;
/// A mask without the highest two bits of an attribute's type, which are flags.
const NLA_TYPE: u16 = 0x3fff;

const MESSAGE_HEADER: usize = 16;
/// The position of a message's sequence number.
const SEQUENCE: Range<usize> = 8..12;
const ATTRIBUTE_HEADER: usize = 4;
/// The size of the buffer for answers that are read in one call: twice what the kernel puts
/// together.
const MOST_AT_ONCE: usize = 64 << 10;
/// The number of attempts to read a list that changes meanwhile.
const DUMP_TRIES: usize = 8;
const CHANGING: &str = "the list kept changing while it was read";
/// The number of messages in one call. The kernel's default receive buffer has room for a refusal
/// of each, with its message.
const PORTION: usize = 128;

/// A sequence of messages. Header fields are in the machine's byte order.
#[derive(Clone, Debug, Default)]
pub struct Messages {
    /// The messages before those of `bytes`.
    earlier: Vec<Vec<u8>>,
    bytes: Vec<u8>,
    /// The position in `bytes` where the last message begins.
    last: usize,
    count: u32,
}

impl Messages {
    /// Begins a message. `header` is the protocol's own, such as `nfgenmsg`. Its length must be a
    /// multiple of 4.
    pub fn begin(&mut self, kind: u16, flags: u16, header: &[u8]) -> &mut Self {
        self.last = self.bytes.len();
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        self.bytes.extend(self.count.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(header);
        self.count += 1;
        self.close(self.last)
    }

    /// Returns the number of messages, which is also the next one's sequence number.
    pub fn count(&self) -> u32 {
        self.count
    }

    pub fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        // An attribute holds at most 64 KiB. None of ours comes near that.
        let length = (ATTRIBUTE_HEADER + value.len()) as u16;
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.close(self.last)
    }

    /// Adds attributes in the form in which the kernel has listed them.
    pub fn raw(&mut self, attributes: &[u8]) {
        self.bytes.extend(attributes);
        self.close(self.last);
    }

    /// Adds an attribute with a text that ends with a zero byte.
    pub fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        let mut bytes = Vec::with_capacity(value.len() + 1);
        bytes.extend(value.as_bytes());
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    pub fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) -> &mut Self {
        let start = self.bytes.len();
        self.attribute(kind | NLA_F_NESTED, &[]);
        fill(self);
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self
    }

    fn close(&mut self, start: usize) -> &mut Self {
        let length = (self.bytes.len() - start) as u32;
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self
    }

    /// Puts other messages behind these, without copying either.
    pub fn append(&mut self, mut others: Self) {
        others.earlier.push(std::mem::take(&mut others.bytes));
        self.earlier.push(std::mem::take(&mut self.bytes));
        for mut bytes in others.earlier {
            self.count += renumber(&mut bytes, self.count);
            self.earlier.push(bytes);
        }
    }

    /// Returns the messages since the last [`Self::append`], or all if there was none.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Gives the messages sequence numbers from `first` on.
    fn number_from(&mut self, first: u32) {
        let mut next = first;
        for bytes in self.earlier.iter_mut().chain([&mut self.bytes]) {
            next = next.wrapping_add(renumber(bytes, next));
        }
    }

    /// Returns the bytes of all messages, buffer by buffer.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.earlier.iter().chain([&self.bytes]).map(Vec::as_slice)
    }

    /// Returns the length of all messages in bytes.
    pub fn length(&self) -> usize {
        self.parts().map(<[u8]>::len).sum()
    }
}

/// Gives the messages sequence numbers from `first` on, and returns how many there are.
fn renumber(messages: &mut [u8], first: u32) -> u32 {
    let (mut rest, mut count) = (messages, 0);
    while let Some(length) = word(rest, 0)
        && let Some((message, others)) = rest.split_at_mut_checked((length as usize).next_multiple_of(4))
        && let Some(field) = message.get_mut(SEQUENCE)
    {
        field.copy_from_slice(&first.wrapping_add(count).to_ne_bytes());
        count += 1;
        rest = others;
    }
    count
}

/// Returns two bytes as a number in the machine's byte order.
pub(crate) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Returns four bytes as a number in the machine's byte order.
pub fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A sequence of attributes, as pairs of type and value. It ends at the first malformed one.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Attributes<'a> {
    pub fn get(self, wanted: u16) -> Option<&'a [u8]> {
        self.into_iter().find_map(|(kind, value)| (kind == wanted).then_some(value))
    }

    pub fn nested(self, wanted: u16) -> Option<Self> {
        self.get(wanted).map(Attributes)
    }

    /// Returns a text attribute up to its zero byte.
    pub fn text(self, wanted: u16) -> Option<&'a str> {
        text(self.get(wanted)?)
    }
}

/// Returns the address at the beginning of `bytes`. Returns `None` if there are too few bytes or
/// the family is neither AF_INET nor AF_INET6.
pub fn ip_address(family: i32, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        libc::AF_INET => Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?).into()),
        libc::AF_INET6 => Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).into()),
        _ => None,
    }
}

/// Returns the text up to the first zero byte, or `None` if it is not UTF-8.
pub fn text(bytes: &[u8]) -> Option<&str> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    std::str::from_utf8(bytes.get(..end)?).ok()
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(half(self.0, 0)?);
        let kind = half(self.0, 2)? & NLA_TYPE;
        let value = self.0.get(ATTRIBUTE_HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}

/// The kernel's answer to a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum NetlinkAnswer<'a> {
    /// The type, the flags and what follows the header.
    Message(u16, u16, &'a [u8]),
    /// The error number. 0 means that the request was carried out.
    Verdict(i32),
    /// The error number, which is 0 for success, and the flags of the message.
    EndOfDump(i32, u16),
}

/// Gives every answer in `bytes` to `take`, with the sequence number of the request that it
/// answers.
fn each_answer(bytes: &[u8], mut take: impl FnMut(NetlinkAnswer<'_>, u32)) {
    let mut rest = bytes;
    while let (Some(length), Some(kind), Some(flags), Some(sequence)) =
        (word(rest, 0), half(rest, 4), half(rest, 6), word(rest, 8))
    {
        let length = length as usize;
        let Some(body) = rest.get(MESSAGE_HEADER..length) else { return };
        let errno = || word(body, 0).unwrap_or(0).cast_signed().wrapping_neg();
        let answer = match kind {
            NLMSG_ERROR => NetlinkAnswer::Verdict(errno()),
            // A value that is not negative is no error here.
            NLMSG_DONE => NetlinkAnswer::EndOfDump(errno().max(0), flags),
            kind => NetlinkAnswer::Message(kind, flags, body),
        };
        take(answer, sequence);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

/// Returns the kernel's message in a verdict that has [`NLM_F_CAPPED`] and attributes.
fn words(verdict: &[u8]) -> Option<&str> {
    const ERRNO: usize = 4;
    const WITH_WORDS: u16 = NLM_F_CAPPED | NLM_F_ACK_TLVS;
    let has_words = half(verdict, 6)? & WITH_WORDS == WITH_WORDS;
    let length = word(verdict, 0)? as usize;
    let attributes = verdict.get(MESSAGE_HEADER + ERRNO + MESSAGE_HEADER..length).filter(|_| has_words)?;
    Attributes(attributes).text(NLMSGERR_ATTR_MSG)
}

/// The state of reading the answers to one request.
#[derive(Debug)]
struct Reading {
    sequence: u32,
    flags: u16,
    /// The error number at the end, 0 for success. `None` until the end is read.
    end: Option<i32>,
}

impl Reading {
    fn new(sequence: u32) -> Self {
        Self { sequence, flags: 0, end: None }
    }

    fn go_on(&mut self, bytes: &[u8], take: &mut impl FnMut(u16, &[u8])) {
        each_answer(bytes, |answer, sequence| {
            if sequence != self.sequence || self.end.is_some() {
                return;
            }
            match answer {
                NetlinkAnswer::Message(kind, flags, body) => {
                    self.flags |= flags;
                    take(kind, body);
                }
                NetlinkAnswer::Verdict(errno) => self.end = Some(errno),
                NetlinkAnswer::EndOfDump(errno, flags) => {
                    self.flags |= flags;
                    self.end = Some(errno);
                }
            }
        });
    }
}

/// A message that the kernel has refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Refused {
    /// The index of the message among those that were sent.
    pub message: u32,
    pub errno: i32,
}

/// A connection to one protocol of the kernel.
pub struct NetlinkSocket {
    socket: Socket,
    /// The sequence number of the next message. No number is used twice, so that a late answer to
    /// one request is never taken for the answer to another.
    next: AtomicU32,
}

impl NetlinkSocket {
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, next: AtomicU32::new(1) })
    }

    /// Sends one request and gives the type and body of each answer to `take`, until the kernel is
    /// done.
    pub fn request(&self, request: &Messages, mut take: impl FnMut(u16, &[u8])) -> io::Result<()> {
        let sequence = self.send(request)?;
        self.read(sequence, |kind, body| take(kind, body)).map(drop)
    }

    /// Returns the kernel's verdict on a request that is only acknowledged. With it comes a message
    /// of the kernel or of a driver, if there is one.
    pub fn verdict(&self, request: &Messages) -> io::Result<(io::Result<()>, Option<String>)> {
        self.socket.set_ext_ack(true).and_then(|()| self.socket.set_cap_ack(true))?;
        let sequence = self.send(request)?;
        let mut bytes = BytesMut::with_capacity(MOST_AT_ONCE);
        loop {
            self.receive(&mut bytes, 0)?;
            let mut verdict = None;
            each_answer(&bytes, |answer, of| {
                if let NetlinkAnswer::Verdict(errno) = answer
                    && of == sequence
                {
                    verdict = Some(errno);
                }
            });
            if let Some(errno) = verdict {
                let result = if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
                return Ok((result, words(&bytes).map(str::to_owned)));
            }
        }
    }

    /// Reads a list that does not change from its beginning to its end. `parse` may be called for
    /// an attempt that is discarded.
    pub fn dump<T>(&self, request: &Messages, parse: impl Fn(u16, &[u8]) -> Option<T>) -> io::Result<Vec<T>> {
        for _ in 0..DUMP_TRIES {
            let mut list = Vec::new();
            let sequence = self.send(request)?;
            match self.read(sequence, |kind, body| list.extend(parse(kind, body))) {
                Ok(flags) if flags & NLM_F_DUMP_INTR == 0 => return Ok(list),
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other(CHANGING))
    }

    /// Reads a list as [`Self::dump`] does, and also accepts one that reads the same twice. The
    /// kernel reports a list of nf_tables as interrupted even if only another program's table has
    /// changed.
    pub fn dump_of_part<T: PartialEq>(
        &self,
        request: &Messages,
        parse: impl Fn(u16, &[u8]) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let mut before = None;
        for _ in 0..DUMP_TRIES {
            let mut list = Vec::new();
            let sequence = self.send(request)?;
            match self.read(sequence, |kind, body| list.extend(parse(kind, body))) {
                Ok(flags) if flags & NLM_F_DUMP_INTR == 0 => return Ok(list),
                Ok(_) if before.as_ref() == Some(&list) => return Ok(list),
                Ok(_) => before = Some(list),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other(CHANGING))
    }

    /// Sends a single request with a new sequence number, and returns that number.
    fn send(&self, request: &Messages) -> io::Result<u32> {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let mut bytes = request.bytes().to_vec();
        if let Some(field) = bytes.get_mut(SEQUENCE) {
            field.copy_from_slice(&sequence.to_ne_bytes());
        }
        self.socket.send(&bytes, 0)?;
        Ok(sequence)
    }

    /// Receives one buffer of answers. The kernel fills as much as the largest buffer that it was
    /// ever given has room for. A list in small pieces takes it longer than one in large ones,
    /// because it searches for its position in the list anew for each.
    fn receive(&self, bytes: &mut BytesMut, flags: libc::c_int) -> io::Result<()> {
        bytes.clear();
        let length = self.socket.recv(bytes, libc::MSG_TRUNC | flags)?;
        if length > bytes.len() {
            return Err(io::Error::other(format!(
                "an answer of {length} bytes is longer than any should be"
            )));
        }
        Ok(())
    }

    /// Reads the answers to a request, and returns all flags that they have.
    fn read(&self, sequence: u32, mut take: impl FnMut(u16, &[u8])) -> io::Result<u16> {
        let (mut reading, mut bytes) = (Reading::new(sequence), BytesMut::with_capacity(MOST_AT_ONCE));
        while reading.end.is_none() {
            self.receive(&mut bytes, 0)?;
            reading.go_on(&bytes, &mut take);
        }
        match reading.end {
            None | Some(0) => Ok(reading.flags),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Sends the message that `write` makes of each item, many in one call. Returns those that were
    /// refused, by index. The limits of [`Self::send_at_once`] apply. After an error, the messages
    /// from some portion on were not sent.
    pub fn send_each<T>(
        &self,
        items: &[T],
        write: impl Fn(&T, &mut Messages),
    ) -> io::Result<Vec<(usize, i32)>> {
        let mut refused = Vec::new();
        for (portion, items) in items.chunks(PORTION).enumerate() {
            let mut messages = Messages::default();
            items.iter().for_each(|item| write(item, &mut messages));
            let of_portion = self.send_at_once(messages, |_| Ok(()))?;
            refused.extend(
                of_portion.into_iter().map(|one| (portion * PORTION + one.message as usize, one.errno)),
            );
        }
        Ok(refused)
    }

    /// Sends all messages in one call, and returns those that were refused. This works with
    /// protocols that have answered when the call returns, such as nfnetlink. If the socket has no
    /// room for all refusals, the kernel drops the rest, and only some are returned.
    pub fn send_at_once(
        &self,
        mut messages: Messages,
        room: impl FnOnce(&Socket) -> io::Result<()>,
    ) -> io::Result<Vec<Refused>> {
        room(&self.socket)?;
        let first = self.next.fetch_add(messages.count(), Ordering::Relaxed);
        messages.number_from(first);
        // Old answers would take the room of the new ones, and an old overflow would be taken for a
        // new one.
        self.take_waiting(|_| ())?;
        let parts: Vec<_> = messages.parts().map(IoSlice::new).collect();
        sendmsg::<NetlinkAddr>(self.socket.as_raw_fd(), &parts, &[], MsgFlags::empty(), None)?;
        let mut refused = Vec::new();
        let overflow = self.take_waiting(|bytes| {
            each_answer(bytes, |answer, sequence| {
                let message = sequence.wrapping_sub(first);
                if let NetlinkAnswer::Verdict(errno) = answer
                    && errno != 0
                    && message < messages.count()
                {
                    refused.push(Refused { message, errno });
                }
            });
        })?;
        match overflow {
            // Something was refused, but it is not known what.
            Some(overflow) if refused.is_empty() => Err(overflow),
            Some(_) | None => Ok(refused),
        }
    }

    /// Gives the answers that wait to `take`, until there are none. Returns ENOBUFS if the kernel
    /// has dropped some because there was no room.
    fn take_waiting(&self, mut take: impl FnMut(&[u8])) -> io::Result<Option<io::Error>> {
        let (mut overflow, mut bytes) = (None, BytesMut::with_capacity(MOST_AT_ONCE));
        loop {
            match self.receive(&mut bytes, libc::MSG_DONTWAIT) {
                Ok(()) => take(&bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(overflow),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => overflow = Some(error),
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests;
