package nodepools

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
)

// A status that the API server refuses is never written.
func TestAConditionIsOfAcceptableSize(t *testing.T) {
	for name, o := range map[string]outcome{
		"invalid": {invalid: []string{strings.Repeat("ä", 33000)}},
		"failing": {clusters: 3, failing: []string{strings.Repeat("a", 12000), strings.Repeat("ä", 12000), strings.Repeat("b", 12000)}},
	} {
		t.Run(name, func(t *testing.T) {
			message := o.condition().Message
			assert.LessOrEqual(t, len(message), maxMessage)
			assert.Greater(t, len(message), maxMessage-4, "as much as fits is shown")
			assert.True(t, strings.HasSuffix(message, "…"))
			assert.True(t, utf8.ValidString(message))
		})
	}
	assert.Equal(t, "ä", cut("ä", 2))
}
