package claims

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// token records when a holder's claims were listed, and which claims there were. It is not secret:
// it only limits what its own holder can collect.
type token struct {
	Namespace string `json:"n"`
	Cluster   string `json:"c"`
	Holder    string `json:"h"`
	// Time is when the listing began, by the clock of the agent that made the token.
	Time time.Time `json:"t"`
	// Newest is when the newest of the listed claims was made, by the API server's clock; zero when
	// there was none.
	Newest time.Time `json:"l,omitzero"`
	// Last is the digest of the listed claims that were made at Newest. The API server's timestamps
	// have a resolution of one second, so more claims may have been made in that second after the
	// listing.
	Last string `json:"d,omitempty"`
}

func newToken(o ListOptions, begun time.Time, listed []v1alpha1.MachineClaim) token {
	t := token{Namespace: o.Namespace, Cluster: o.Cluster, Holder: o.Holder, Time: begun}
	for i := range listed {
		if made := listed[i].CreationTimestamp.Time; made.After(t.Newest) {
			t.Newest = made
		}
	}
	if !t.Newest.IsZero() {
		t.Last = digestAt(t.Newest, listed)
	}
	return t
}

// digestAt returns a digest of the ids of the claims that were made at a time.
func digestAt(made time.Time, claims []v1alpha1.MachineClaim) string {
	var names []string
	for i := range claims {
		if claims[i].CreationTimestamp.Time.Equal(made) {
			names = append(names, claims[i].Spec.ClaimID)
		}
	}
	slices.Sort(names)
	sum := sha256.Sum256([]byte(strings.Join(names, " ")))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// listed returns a function that reports whether one of the present claims was certainly in the
// token's listing. It compares only times of the API server's clock. For claims of the listing's
// last second it is certain only if that second's claims are still the same. Otherwise a later
// listing decides.
func (t token) listed(now []v1alpha1.MachineClaim) func(*v1alpha1.MachineClaim) bool {
	same := !t.Newest.IsZero() && digestAt(t.Newest, now) == t.Last
	return func(c *v1alpha1.MachineClaim) bool {
		made := c.CreationTimestamp.Time
		return made.Before(t.Newest) || same && made.Equal(t.Newest)
	}
}

func (t token) encode() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings and times always encode
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// parseToken returns the token of a request. It must have been made for the same Cluster and
// holder, at most TokenLife ago. Its time is never in the future: if the clock of the agent that
// made it is ahead, the present time is used.
func (e *Engine) parseToken(r SyncRequest) (token, error) {
	data, err := base64.RawURLEncoding.DecodeString(r.Token)
	if err != nil {
		return token{}, ErrInvalidToken
	}
	var t token
	if err := json.Unmarshal(data, &t); err != nil {
		return token{}, ErrInvalidToken
	}
	if t.Namespace != r.Namespace || t.Cluster != r.Cluster || t.Holder != r.Holder || t.Time.IsZero() {
		return token{}, ErrInvalidToken
	}
	now := e.Clock.Now()
	if age := now.Sub(t.Time); age.Abs() > e.TokenLife {
		return token{}, ErrStaleToken
	}
	if t.Time.After(now) { // by a clock that is ahead of this agent's, which dates what it is compared with
		t.Time = now
	}
	return t, nil
}
