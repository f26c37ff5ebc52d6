package placeholder_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

func TestPlaceholdersSayWhatTheyStandFor(t *testing.T) {
	id := placeholder.ProviderID("fleet", "berlin", "5f0e")
	assert.Equal(t, "capi-claim://fleet/berlin/5f0e", id)
	assert.True(t, placeholder.Is(id))
	namespace, name, claimID, ok := placeholder.Parse(id)
	assert.True(t, ok)
	assert.Equal(t, []string{"fleet", "berlin", "5f0e"}, []string{namespace, name, claimID})
}

func TestOtherProviderIDsAreNoPlaceholders(t *testing.T) {
	for _, id := range []string{"", "aws:///eu-central-1a/i-0", "capi-claim://", "capi-claim://a/b", "capi-claim://a/b/c/d", "capi-claim:///b/c"} {
		_, _, _, ok := placeholder.Parse(id)
		assert.False(t, ok, id)
	}
	assert.False(t, placeholder.Is("kwok://node"))
}
