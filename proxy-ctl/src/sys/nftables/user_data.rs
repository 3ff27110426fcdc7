//! User data of tables, sets, rules and elements: a list of type, length and value, with one byte
//! each for type and length. nft notes comments in it.

use crate::sys::net::netlink::text;

/// The type of a comment of a table, a rule or an element.
pub const COMMENT: u8 = 0;

/// Adds a value, of which 255 bytes fit.
pub fn add(list: &mut Vec<u8>, kind: u8, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u8::MAX))];
    list.extend([kind, value.len() as u8]);
    list.extend(value);
}

/// Adds a comment in the format of nft, of which 254 bytes fit.
pub fn add_comment(list: &mut Vec<u8>, comment: &str) {
    let bytes = &comment.as_bytes()[..comment.len().min(254)];
    add(list, COMMENT, &[bytes, &[0]].concat());
}

pub fn get(mut list: &[u8], wanted: u8) -> Option<&[u8]> {
    loop {
        let [kind, length, rest @ ..] = list else { return None };
        let (value, after) = rest.split_at_checked(usize::from(*length))?;
        if *kind == wanted {
            return Some(value);
        }
        list = after;
    }
}

pub fn comment(list: &[u8]) -> Option<&str> {
    get(list, COMMENT).and_then(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_type_and_what_is_cut_off_is_not_there() {
        let mut list = Vec::new();
        add_comment(&mut list, "mine");
        add(&mut list, 7, &[1, 2]);
        assert_eq!(list, [0, 5, b'm', b'i', b'n', b'e', 0, 7, 2, 1, 2]);
        assert_eq!((comment(&list), get(&list, 7), get(&list, 8)), (Some("mine"), Some(&[1, 2][..]), None));
        assert_eq!(get(&list[..list.len() - 1], 7), None);
    }
}
