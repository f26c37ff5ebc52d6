package protocol

import (
	"strings"
	"unicode"
)

// MaxMessage is the length of a claim's messages, in bytes. The CRD allows as many characters.
const MaxMessage = 1024

// Line makes one line of a text that a caller or an infrastructure provider wrote, cut to [MaxMessage].
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
