//! Text of iptables as a Rust string. Rules of other programs may contain any bytes, because
//! iptables cuts comments after 255 bytes. A rule is deleted by its text, so what is read must be
//! written back unchanged.

use std::borrow::Cow;

/// The private character that stands for the byte 0. Only those for bytes from 0x80 on are used:
/// U+10FF80 to U+10FFFF.
const PRIVATE: u32 = 0x10_ff00;

fn is_private(character: char) -> bool {
    u32::from(character) >= PRIVATE + 0x80
}

fn hide(text: &mut String, bytes: &[u8]) {
    text.extend(bytes.iter().filter_map(|byte| char::from_u32(PRIVATE + u32::from(*byte))));
}

/// Returns `bytes` as text in which a private character stands for each byte that is not UTF-8.
/// [`encode`] is the reverse.
pub(super) fn decode(bytes: &[u8]) -> Cow<'_, str> {
    if let Ok(text) = std::str::from_utf8(bytes)
        && (text.is_ascii() || !text.contains(is_private))
    {
        return text.into();
    }
    let mut text = String::with_capacity(bytes.len() * 2);
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            // A private character in the input must not become a single byte when it is encoded.
            if is_private(character) {
                hide(&mut text, character.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                text.push(character);
            }
        }
        hide(&mut text, chunk.invalid());
    }
    text.into()
}

/// Returns the bytes from which [`decode`] has made `text`.
pub(super) fn encode(text: &str) -> Cow<'_, [u8]> {
    if text.is_ascii() || !text.contains(is_private) {
        return text.as_bytes().into();
    }
    let mut bytes = Vec::with_capacity(text.len());
    for character in text.chars() {
        match u8::try_from(u32::from(character).wrapping_sub(PRIVATE)) {
            Ok(byte) if is_private(character) => bytes.push(byte),
            Ok(_) | Err(_) => bytes.extend(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes.into()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::ascii(b"-A INPUT -j ACCEPT", "-A INPUT -j ACCEPT")]
    #[case::utf8("caf\u{e9}".as_bytes(), "caf\u{e9}")]
    #[case::latin1(b"caf\xe9 -j DROP", "caf\u{10ffe9} -j DROP")]
    #[case::cut_in_a_character(b"caf\xc3", "caf\u{10ffc3}")]
    #[case::private_character("\u{10ffe9}".as_bytes(), "\u{10fff4}\u{10ff8f}\u{10ffbf}\u{10ffa9}")]
    #[case::first_and_last_byte(b"\x80\xff", "\u{10ff80}\u{10ffff}")]
    #[case::nothing(b"", "")]
    fn any_bytes_come_back_unchanged(#[case] bytes: &[u8], #[case] text: &str) {
        assert_eq!(decode(bytes), text);
        assert_eq!(*encode(text), *bytes);
    }
}
