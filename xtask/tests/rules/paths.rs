//! The paths that source code names.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};

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
            TokenTree::Punct(mark) if mark.as_char() == ':' => path.push(':'),
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
