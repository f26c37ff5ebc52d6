package protocol

import (
	"strings"
	"unicode"
)

// MaxMessage is the maximum length of a claim's message, in bytes. The CRD allows as many
// characters.
const MaxMessage = 1024

// Line turns text written by a caller or an infrastructure provider into a single line of at most
// [MaxMessage] bytes.
func Line(text string) string {
	text = strings.ToValidUTF8(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text), "")
	const cut = "…"
	if len(text) <= MaxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:MaxMessage-len(cut)], "") + cut
}
