//! The paths that source code names.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Collects every path, with `{…}` of imports spelled out. Comments are no tokens, and a string
/// literal is a token that is no path.
pub(crate) fn paths(tokens: TokenStream, prefix: &str, found: &mut BTreeSet<String>) {
    let mut path = String::new();
    let mut end = |path: &mut String| {
        let whole = std::mem::take(path);
        if !whole.is_empty() {
            found.insert(format!("{prefix}{}", whole.trim_end_matches(':')));
        }
    };
    let mut groups = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                if !path.ends_with("::") {
                    end(&mut path);
                }
                path.push_str(&word.to_string());
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => path.push(':'),
            TokenTree::Group(group) if path.ends_with("::") => {
                groups.push((group, format!("{prefix}{}", std::mem::take(&mut path))));
            }
            TokenTree::Group(group) => {
                end(&mut path);
                groups.push((group, String::new()));
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => end(&mut path),
        }
    }
    end(&mut path);
    groups.into_iter().for_each(|(group, prefix)| paths(group.stream(), &prefix, found));
}

/// Returns the tokens without items that are compiled for tests only.
pub(crate) fn without_tests(tokens: TokenStream) -> TokenStream {
    let mut tokens = tokens.into_iter().peekable();
    let mut kept = Vec::new();
    while let Some(token) = tokens.next() {
        match (token, tokens.peek()) {
            (TokenTree::Punct(punct), Some(TokenTree::Group(attribute)))
                if punct.as_char() == '#' && attribute.stream().to_string() == "cfg (test)" =>
            {
                tokens.find(ends_item);
            }
            (TokenTree::Group(group), _) => {
                let inner = without_tests(group.stream());
                kept.push(proc_macro2::Group::new(group.delimiter(), inner).into());
            }
            (token, _) => kept.push(token),
        }
    }
    kept.into_iter().collect()
}

fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Punct(punct) => punct.as_char() == ';',
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Ident(_) | TokenTree::Literal(_) => false,
    }
}

#[test]
fn items_of_tests_are_left_out() {
    let source = "use a::b; #[cfg(test)] use c::{d, e}; impl F { #[cfg(test)] fn g(&self) -> [u8; 4] { h::i() } fn j() { k::l() } }
        #[cfg(test)] #[path = \"m\"] mod m; #[cfg(not(test))] mod n;";
    let mut found = BTreeSet::new();
    paths(without_tests(source.parse().unwrap()), "", &mut found);
    assert!(found.contains("a::b") && found.contains("k::l") && found.contains("n"), "{found:?}");
    assert!(["c::d", "c::e", "g", "h::i", "m"].iter().all(|path| !found.contains(*path)), "{found:?}");
}
