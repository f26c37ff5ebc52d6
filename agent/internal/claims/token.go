package claims

import (
	"encoding/base64"
	"encoding/json"
	"time"
)

// token remembers when a holder's claims were listed. It is no secret: it only limits what its own holder can collect.
type token struct {
	Namespace string    `json:"n"`
	Cluster   string    `json:"c"`
	Holder    string    `json:"h"`
	Time      time.Time `json:"t"`
}

func (t token) encode() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings and a time always encode
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// parseToken returns the time of the listing that the token was made by, no longer ago than life.
func parseToken(text, namespace, cluster, holder string, now time.Time, life time.Duration) (time.Time, error) {
	data, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return time.Time{}, ErrInvalidToken
	}
	var t token
	if err := json.Unmarshal(data, &t); err != nil {
		return time.Time{}, ErrInvalidToken
	}
	if t.Namespace != namespace || t.Cluster != cluster || t.Holder != holder || t.Time.IsZero() {
		return time.Time{}, ErrInvalidToken
	}
	if age := now.Sub(t.Time); age > life || age < -time.Minute {
		return time.Time{}, ErrStaleToken
	}
	return t.Time, nil
}
